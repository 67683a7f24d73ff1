import org.apache.kafka.common.utils.Utils;
import java.util.Random;
public class Vectors {
  static String hex(byte[] b){StringBuilder s=new StringBuilder();for(byte x:b)s.append(String.format("%02x",x&0xff));return s.toString();}
  static int rows=0; static StringBuilder out=new StringBuilder();
  static void row(byte[] k){
    int h=Utils.murmur2(k); int p=Utils.toPositive(h);
    if(rows++>0)out.append(",\n");
    out.append("  {\"key\": \"").append(hex(k)).append("\", \"murmur2\": ").append(h).append(", \"partition_of\": {");
    int[] ns={1,2,3,7,12,64,100,10000}; 
    for(int i=0;i<ns.length;i++){ if(i>0)out.append(", "); out.append("\"").append(ns[i]).append("\": ").append(p%ns[i]); }
    out.append("}}");
  }
  public static void main(String[] a) throws Exception {
    for(String s:new String[]{"","a","ab","abc","abcd","abcde","21","foobar","a-little-bit-long-string","a-little-bit-longer-string","lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8","UA","AA","B6","DL","EV","WN","key-0","été","\u65e5\u672c"}) row(s.getBytes("UTF-8"));
    Random r=new Random(20250101L);
    for(int len=0;len<70;len++){ for(int j=0;j<3;j++){ byte[] b=new byte[len]; r.nextBytes(b); row(b);} }
    for(int len: new int[]{1,2,3,4,5,6,7,8}) { byte[] b=new byte[len]; java.util.Arrays.fill(b,(byte)0xff); row(b); byte[] z=new byte[len]; row(z); byte[] h=new byte[len]; java.util.Arrays.fill(h,(byte)0x80); row(h);}    
    for(int len: new int[]{255,256,257,1000,4099}) { byte[] b=new byte[len]; r.nextBytes(b); row(b); }
    System.out.println("{\"how\": \"org.apache.kafka:kafka-clients:4.1.0, Utils.murmur2 and Utils.toPositive, run with Java on tests/data/partitioner/Vectors.java\",\n \"vectors\": [\n"+out+"\n]}");
  }
}
